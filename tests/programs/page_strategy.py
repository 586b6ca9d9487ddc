"""A strategy that writes the five abstract methods of the page and nothing else, and returns what the page says."""

import torch

from lightrl.strategy import StrategyBase


class PageStrategy(StrategyBase):
    def create_optimizer(self, model, **kwargs):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **kwargs)

    def backward(self, loss, model, optimizer, **kwargs):
        loss.backward()

    def optimizer_step(self, optimizer, model, scheduler, name="model", **kwargs):
        if self.max_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()

    def save_ckpt(self, model, save_dir, tag=None, max_num=3, max_mem=1000, client_state=None, save_latest=True):
        torch.save(model.state_dict(), f"{save_dir}.pt")

    def load_ckpt(
        self, model, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
        load_lr_scheduler_states=True, load_module_only=False,
    ):  # fmt: skip
        model.load_state_dict(torch.load(f"{load_dir}.pt", weights_only=True))


class AveragingPageStrategy(PageStrategy):
    """Reduces gradients by itself, as its author did on the page's own base."""

    def optimizer_step(self, optimizer, model, scheduler, name="model", **kwargs):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = self.all_reduce(parameter.grad, "mean")
        super().optimizer_step(optimizer, model, scheduler, name, **kwargs)
