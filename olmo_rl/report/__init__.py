"""report.html: what a run did, why its steps took as long as they did, what it learned; read from its
directory alone. No torch.
"""
