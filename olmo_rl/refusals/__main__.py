"""Print the table of refusals as markdown."""

from olmo_rl.refusals import markdown

print(markdown())
