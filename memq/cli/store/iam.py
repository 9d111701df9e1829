"""`memq iam`: the least-privilege policy of the bucket for a role."""

from __future__ import annotations

import json

import click

from memq.cli.options import setting_options, settings_of
from memq.errors import InvalidSettingError
from memq.settings import Value
from memq.storage_handlers.s3.policies import ROLES, policy_of
from memq.storage_handlers.s3.settings import read_bucket


@click.command()
@click.argument("role", type=click.Choice(ROLES))
@click.option("--topic", "topics", multiple=True, metavar="NAME", help="Only this topic; may be repeated.")
@click.option("--no-delete", is_flag=True, help="Without the right to delete: for delete_objects = false.")
@click.option("--kms", metavar="ARN", default="", help="The key of AWS KMS that encrypts the bucket.")
@setting_options("store", "cluster")
def iam(
    *,
    role: str,
    topics: tuple[str, ...],
    no_delete: bool,
    kms: str,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Print the policy of AWS IAM that a ROLE needs on the bucket of the store, and no more.

    A producer needs no policy unless its transactions stage their parts in the store. Shared and staged objects have
    records of several topics, so --topic does not hide those.
    """
    settings = settings_of(config, profile, **flags)
    parts = settings.parts()
    if not parts.store.startswith("s3:"):
        raise InvalidSettingError(
            f"store = {parts.store} is no bucket", hint="set store, or use --store s3://BUCKET/PREFIX"
        )
    bucket = read_bucket(parts.store, parts.section("s3"))
    cluster = settings.broker().cluster
    policy = policy_of(role, bucket.name, bucket.prefix, cluster, topics=topics, deletes=not no_delete, kms=kms)
    click.echo(json.dumps(policy, indent=2))
