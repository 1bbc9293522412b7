"""The parts of `examples/train_live.py`; read that file first."""
