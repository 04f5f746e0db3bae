"""One line that marks the steps and phases of a PyTorch job.

    import highwater

    highwater.torch.watch(model, optimizer, dataloader)
"""

from .watch import watch

__all__ = ["watch"]
