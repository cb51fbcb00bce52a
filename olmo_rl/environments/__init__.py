"""What runs in the environment process, beside the verifiers library. Nothing of it imports torch."""
