"""The micro-batch policy for stages that have a device each, as sleeping and simulated ranks stand for."""

from async_pp.core.policy import Balanced, FillFirst, Policy, PolicyName


def policy_of(name: PolicyName, stages: int) -> Policy:
    """The policy of this name. On a CPU the engine would take its stages for sharing memory, as real ones do there."""
    return Balanced(stages, ahead=True) if name == "balanced" and stages > 1 else FillFirst()
