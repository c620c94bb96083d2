"""The paper's own analyses on any models, one a file; each reproduces one of its tables or figures."""
