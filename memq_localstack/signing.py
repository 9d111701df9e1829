"""Signs one S3 request without a body, by AWS Signature Version 4, so that the launcher can make a bucket by itself."""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime

EMPTY = hashlib.sha256(b"").hexdigest()


def signed_headers(
    method: str, host: str, path: str, *, access_key: str, secret_key: str, region: str, now: datetime
) -> dict[str, str]:
    """Return the headers of a request for `path` (no query, nothing to escape) at the moment `now`, in UTC.

    Source: AWS Signature Version 4, "create a signed AWS API request".
    """
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    headers = {"host": host, "x-amz-content-sha256": EMPTY, "x-amz-date": moment}
    names = ";".join(headers)
    listed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = hashlib.sha256(f"{method}\n{path}\n\n{listed}\n{names}\n{EMPTY}".encode()).hexdigest()
    key = f"AWS4{secret_key}".encode()
    for part in (moment[:8], region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{request}".encode(), "sha256").hex()
    credential = f"Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "authorization": f"AWS4-HMAC-SHA256 {credential}"}
