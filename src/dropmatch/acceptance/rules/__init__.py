"""The acceptance rules that come with dropmatch, one a file. Importing a module registers its rule.

DropMatch's own are `naive` and `js`; `strict` is lossless; the others are those of other papers and engines, to
compare with.
"""

from dropmatch.acceptance.rules import ensemble, fly, fuzzy, js, margin, naive, strict, threshold, topk, typical

__all__ = ["ensemble", "fly", "fuzzy", "js", "margin", "naive", "strict", "threshold", "topk", "typical"]
