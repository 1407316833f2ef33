"""The formats of kvq, written a second time in Python: an independent reader of artifacts and dumps, and the codec of
formats/packing.md in numpy and in PyTorch. It shares no code with the C++ library, so that they can check each other.
"""

__version__ = "0.2.0"
