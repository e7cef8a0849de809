"""Mixtures of experts whose experts are shared out over ranks (docs/experts.md): what tsm.transform makes of them.

layers.py          the experts of this rank, and how tokens come to them and go back; what is sent is C++
transformation.py  where the experts of Hugging Face's models are, and their parameters, cut
"""
