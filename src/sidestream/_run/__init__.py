"""The parts of a run: the queue of its saves, restore, leases, retention, pruning, and preemption."""
