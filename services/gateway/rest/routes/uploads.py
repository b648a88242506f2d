"""/v1/uploads: create, parts, complete, cancel."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos.nightshift.v1 import uploads_pb2
from services.gateway import upload_checks
from services.gateway.auth import Caller
from services.gateway.context import Context
from services.gateway.rest.envelope import JsonResponse
from services.gateway.rest.routes.resource import read_body, resource
from services.gateway.rest.translate import upload_object, upload_part_object
from services.gateway.rest.upload import receive_part


class UploadRoutes:
    """Routes of uploads."""

    def __init__(self, context: Context) -> None:
        """Serve the uploads of `context`'s store."""
        self._context = context
        self._store = context.store

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = "/v1/uploads/{upload_id}"
        return [
            *resource(self._context, "/v1/uploads", {"POST": self.create}),
            *resource(self._context, f"{one}/parts", {"POST": self.add_part}),
            *resource(self._context, f"{one}/complete", {"POST": self.complete}),
            *resource(self._context, f"{one}/cancel", {"POST": self.cancel}),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        """Open an upload."""
        wanted = upload_checks.parse_create(await read_body(request))
        upload_checks.check_create(wanted)
        answer = await self._store.call(self._store.uploads.CreateUpload, wanted, caller)
        return JsonResponse(upload_object(answer.upload))

    async def add_part(self, request: Request, caller: Caller) -> Response:
        """Take a part as a multipart form."""
        upload_id = upload_checks.upload_id_of(request.path_params["upload_id"])
        part = await receive_part(request, self._store, caller, upload_id)
        return JsonResponse(upload_part_object(part))

    async def complete(self, request: Request, caller: Caller) -> Response:
        """Make a file of the parts."""
        upload_id = upload_checks.upload_id_of(request.path_params["upload_id"])
        wanted = upload_checks.parse_complete(await read_body(request), upload_id)
        answer = await self._store.complete_upload(wanted, caller)
        return JsonResponse(upload_object(answer.upload))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """Give an upload up; the body is not read, since clients send none or anything."""
        upload_id = upload_checks.upload_id_of(request.path_params["upload_id"])
        answer = await self._store.call(
            self._store.uploads.CancelUpload,
            uploads_pb2.CancelUploadRequest(upload_id=upload_id),
            caller,
        )
        return JsonResponse(upload_object(answer.upload))
