"""What lossy acceptance wins and loses, measured: the lab."""
