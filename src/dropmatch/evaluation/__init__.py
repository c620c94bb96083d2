"""What lossy acceptance wins and loses, measured: tasks, benchmark, lab, judge, and the paper's analyses."""
