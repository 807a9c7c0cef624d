"""Episodes with skills, for the tests of the library, the skill sources and their measures."""

from seed_jax.trajectory import Trajectory, Turn


def turn() -> Turn:
  return Turn("a room", (), "Your task is to: tidy up", [1, 2], [3], [-0.5], "go", "go", True, 0.0)


def episode(group=0, member=0, skill="", won=True, family="heat", turns=1, **changes) -> Trajectory:
  fields = dict(
    task_id=f"task {group}",
    family=family,
    task=f"heat some potato {group}",
    mode="window",
    turns=[turn() for _ in range(turns)],
    won=won,
    episode_return=float(won),
    truncated=False,
  )
  return Trajectory(group=group, member=member, skill=skill, **fields | changes)
