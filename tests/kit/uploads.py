"""Uploads in parts, as a gateway asks a store for them."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from protos.nightshift.v1 import files_pb2, uploads_pb2
from tests.kit.store import Client, our_errors
from tests.kit.streams import told


async def create(
    client: Client,
    size: int,
    *,
    purpose: str = "batch",
    filename: str = "input.jsonl",
    expires_after: files_pb2.ExpiresAfter | None = None,
) -> uploads_pb2.Upload:
    """Open an upload of `size` bytes."""
    with our_errors():
        answer = await client.uploads.CreateUpload(
            uploads_pb2.CreateUploadRequest(
                filename=filename,
                purpose=purpose,
                bytes=size,
                mime_type="application/jsonl",
                expires_after=expires_after,
            ),
            metadata=client.metadata,
        )
    return answer.upload


async def add(client: Client, upload_id: str, content: bytes, *, frame_bytes: int = 1 << 20) -> str:
    """Add a part; return its id."""

    def frames() -> Iterator[uploads_pb2.AddUploadPartRequest]:
        header = uploads_pb2.UploadPartHeader(upload_id=upload_id)
        yield uploads_pb2.AddUploadPartRequest(header=header)
        for start in range(0, len(content), frame_bytes):
            yield uploads_pb2.AddUploadPartRequest(data=content[start : start + frame_bytes])
        yield uploads_pb2.AddUploadPartRequest(footer=uploads_pb2.UploadPartFooter())

    with our_errors():
        call = client.uploads.AddUploadPart(frames(), metadata=client.metadata)
        part: uploads_pb2.UploadPart = (await told(call)).part
    assert part.upload_id == upload_id
    return part.id


async def complete(
    client: Client, upload_id: str, part_ids: Iterable[str], md5: str | None = None
) -> uploads_pb2.Upload:
    """Complete an upload of these parts."""
    with our_errors():
        answer = await client.uploads.CompleteUpload(
            uploads_pb2.CompleteUploadRequest(upload_id=upload_id, part_ids=part_ids, md5=md5),
            metadata=client.metadata,
        )
    return answer.upload


async def cancel(client: Client, upload_id: str) -> uploads_pb2.Upload:
    """Give an upload up."""
    with our_errors():
        answer = await client.uploads.CancelUpload(
            uploads_pb2.CancelUploadRequest(upload_id=upload_id), metadata=client.metadata
        )
    return answer.upload


async def upload_in_parts(
    client: Client, pieces: Sequence[bytes], *, seed: int = 0
) -> files_pb2.File:
    """Upload a batch input in these parts, sent in an order that `seed` shuffles."""
    upload = await create(client, sum(map(len, pieces)))
    order = list(range(len(pieces)))
    random.Random(seed).shuffle(order)
    ids = {number: await add(client, upload.id, pieces[number]) for number in order}
    done = await complete(client, upload.id, [ids[number] for number in range(len(pieces))])
    return done.file


def cut(content: bytes, count: int, *, seed: int = 0) -> list[bytes]:
    """Cut content anywhere into `count` pieces, none of them empty."""
    edges = random.Random(seed).sample(range(1, len(content)), count - 1)
    return [content[a:b] for a, b in itertools.pairwise([0, *sorted(edges), len(content)])]
