"""What is said of a bucket that cannot be worked on, by what the library says of it."""

import pytest

from services.kit.process.settings import SettingsError
from services.store.blobs.s3.faults import check_endpoint, reason

pytestmark = pytest.mark.unit

LIST = "Generic S3 error: Error performing list request: Error performing GET http://s3:9000/b"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            (
                "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in "
                "1ms - Server returned non-2xx status code: 403 Forbidden: denied"
            ),
            "there are no keys for the bucket b: set AWS_ACCESS_KEY_ID",
        ),
        (
            (
                f"{LIST} in 1ms - Received redirect without LOCATION, this normally indicates an "
                "incorrectly configured region"
            ),
            "AWS_REGION is not the region of the bucket b",
        ),
        (f"{LIST} in 2s - HTTP error: error sending request", "nobody answers for the bucket b"),
        (
            (
                f"{LIST} in 1ms - Server returned non-2xx status code: 403 Forbidden: "
                "<?xml version='1.0'?>\n<Error><Code>SignatureDoesNotMatch</Code>"
                "<AWSAccessKeyId>AKIA</AWSAccessKeyId><StringToSign>x</StringToSign></Error>"
            ),
            "refuses the store's keys (SignatureDoesNotMatch)",
        ),
        (
            (
                f"{LIST} in 1ms - Server returned non-2xx status code: 404 Not Found: <?xml?>\n"
                "<Error><Code>NoSuchBucket</Code></Error>\n\nDebug source: much more"
            ),
            "there is no bucket b (NoSuchBucket)",
        ),
        ("something new\n\nDebug source: much more", "cannot be worked on: something new"),
    ],
)
def test_each_fault_says_what_to_look_at(error: str, says: str) -> None:
    said = reason(Exception(error), "b")
    assert says in said
    assert "\n" not in said
    assert "AKIA" not in said


@pytest.mark.parametrize("value", ["127.0.0.1:9000", "not a url", "https://", "http://h:port"])
def test_an_endpoint_must_be_a_url(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", value)
    with pytest.raises(SettingsError, match="AWS_ENDPOINT_URL must be a URL"):
        check_endpoint()


@pytest.mark.parametrize("value", ["", "http://127.0.0.1:9000", "https://s3.example/path"])
def test_a_url_is_one(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", value)
    check_endpoint()
