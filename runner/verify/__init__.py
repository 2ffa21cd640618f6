"""Proofs that a run can be asked for: it is trained again in processes of its own, and compared."""
