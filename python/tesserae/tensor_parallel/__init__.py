"""Layers that are split over tensor-parallel ranks, and how tsm.transform puts them into a model.

parts.py    parameters that are parts of larger tensors; state dicts know them as whole ones
layers.py   linear layers and embeddings on such parameters; what they send is C++ (tesserae/tensor/)
plan.py     which layer of a model is split how: by patterns of names
families.py what is known of Hugging Face's models: plans, heads, layers that read the same input
loss.py     the loss of a language model from logits that are split by the vocabulary
dropout.py  random numbers where activations are split
"""
