"""The LM head many times over: how heads are made, and what rules see of them."""

from dropmatch.heads.build import build_cluster, build_sets, check_heads, rows_per_chunk
from dropmatch.heads.cluster import Cluster
from dropmatch.heads.head import Finish, Head, gathered_logits
from dropmatch.heads.support import Distributions, common_vocab
from dropmatch.heads.vocabulary import likeliest_and_mass, likeliest_token

__all__ = [
    "Cluster",
    "Distributions",
    "Finish",
    "Head",
    "build_cluster",
    "build_sets",
    "check_heads",
    "common_vocab",
    "gathered_logits",
    "likeliest_and_mass",
    "likeliest_token",
    "rows_per_chunk",
]
