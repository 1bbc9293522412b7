"""The writer process, which moves staged bytes to storage in place of threads of the trainer.

Both run the same code (``_storage/bodies`` and the stores). The process receives memory, offsets and framing bytes; it
plans nothing and commits nothing. The modules that it imports (``main``, ``work``) import no torch.
"""
