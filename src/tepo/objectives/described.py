"""What the catalogue tells of everything in it, and what it knows beside objectives: options of decoding."""

from __future__ import annotations

from dataclasses import dataclass

from tepo.objectives.latex import latex
from tepo.objectives.method import Paper, Setting, Status


@dataclass(frozen=True)
class Described:
    """What a paper proposes: its formula, how sure we are of it, and its settings."""

    name: str
    paper: Paper
    formula: str
    status: Status
    notes: str
    summary: str
    settings: tuple[Setting, ...]

    @property
    def latex(self) -> str:
        """The formula in LaTeX, for math mode."""
        return latex(self.formula)

    @property
    def unsure(self) -> tuple[Setting, ...]:
        """The settings whose defaults are inferred or experimental."""
        return tuple(setting for setting in self.settings if setting.status != "confirmed")


@dataclass(frozen=True)
class DecodingOption(Described):
    """What a paper does while decoding: no loss and nothing to train, so the sampler has it, not an objective.

    `section`: the place in a configuration where it is switched on; `settings` are that section's keys.
    """

    section: str

    @property
    def switch(self) -> str:
        """What to add to a command to switch it on."""
        return f"{self.section}.{self.settings[0].name}={self.settings[0].default}"
