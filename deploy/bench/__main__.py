"""python -m hyades.deploy.bench: the same as `hyades bench`."""

from hyades.deploy.commands.bench import command

command(prog_name="hyades bench")
