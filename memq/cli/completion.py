"""`memq completion`: the script that lets a shell complete commands and options of memq."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from memq.cli.commands import COMPLETE_VARIABLE

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    r"""Print the script that completes commands and options of memq in a shell.

    \b
    bash: eval "$(memq completion bash)" in ~/.bashrc
    zsh:  eval "$(memq completion zsh)" in ~/.zshrc, after compinit
    fish: memq completion fish > ~/.config/fish/completions/memq.fish
    """
    from memq.cli.run import program

    kind = get_completion_class(shell)
    assert kind is not None, "click has a class for each of these shells"
    click.echo(kind(program, {}, "memq", COMPLETE_VARIABLE).source())
