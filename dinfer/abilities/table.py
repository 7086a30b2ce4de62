"""The abilities that a step asks, in the order in which it asks them."""

from dinfer.abilities.adjusting import Adjusting
from dinfer.abilities.bias import Bias
from dinfer.abilities.branches import Branched
from dinfer.abilities.candidates import Speculation
from dinfer.abilities.constraints import Constraints
from dinfer.abilities.encoder import Encoder
from dinfer.abilities.feeding import Feeding
from dinfer.abilities.following import Following
from dinfer.abilities.guidance import Guidance
from dinfer.abilities.holding import Holding
from dinfer.abilities.keys_only import KeyPasses
from dinfer.abilities.offering import Offering
from dinfer.abilities.open_positions import OpenPositions
from dinfer.abilities.pacing import Editing, Pacing
from dinfer.abilities.read_positions import ReadPositions
from dinfer.abilities.reports import Reporting
from dinfer.abilities.verification import Verification
from dinfer.abilities.watching import Watching
from dinfer.step.ability import Ability

ABILITIES: tuple[type[Ability], ...] = (
    Adjusting, Offering, Encoder, Branched, Speculation, Following, Holding, Feeding, Watching, Guidance, KeyPasses,
    ReadPositions, OpenPositions, Editing, Pacing, Bias, Verification, Constraints, Reporting,
)  # fmt: skip
