"""What programs of several fields return, and the callbacks that keep it."""

import lightning.pytorch as pl


class Losses(pl.Callback):
    """The loss of every training step, as a tensor."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].detach().clone())


class LossNumbers(pl.Callback):
    """The same, each read by the host."""

    def __init__(self):
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())


def results(trainer, model, losses, **more):
    return {
        "losses": losses.values,
        "metrics": dict(trainer.callback_metrics),
        "weights": model.state_dict(),
        **more,
    }


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
