"""A language model as the judge of a benchmark's texts, after MT-Bench (Zheng et al., arXiv 2306.05685)."""
