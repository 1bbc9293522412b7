"""The saver: who moves staged bytes to storage, threads of the trainer or a process of its own.

Both run the same code (``_storage/bodies``, and the stores). The process is handed memory, offsets and framing bytes;
it plans nothing and commits nothing. What it imports (``main``, ``work``) pulls in no torch.
"""
