"""python -m hyades.deploy.bench: the same as `hyades bench`."""

from hyades.deploy.commands.bench import command as bench

if __name__ == "__main__":
    bench(prog_name="hyades bench")
