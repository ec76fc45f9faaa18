"""Lightning's parts: on CSX they do what stock does, or an error says why not.

base        what a row is, how it runs, what is compared
callbacks   those that change what is trained
watching    those that look on
optimizers  schedulers, and state that host code replaces
arguments   the Trainer's arguments of its loops
data        loaders, transfers, steps that train nothing
"""

from __future__ import annotations

from lightning_parts.arguments import ARGUMENTS
from lightning_parts.base import Part
from lightning_parts.callbacks import CALLBACKS
from lightning_parts.data import DATA
from lightning_parts.optimizers import OPTIMIZERS
from lightning_parts.watching import WATCHING

TABLES: dict[str, dict[str, dict[str, Part]]] = {
    "Callbacks that change what is trained": CALLBACKS,
    "Callbacks that look on": WATCHING,
    "Schedulers and optimizers": OPTIMIZERS,
    "Arguments of the loops": ARGUMENTS,
    "Data": DATA,
}
"""Section -> part -> case -> row, in the order of the docs."""
