"""The public gRPC service `Webhooks`: forwarded, since what is checked the store checks."""

from protos.nightshift.v1 import webhooks_pb2, webhooks_pb2_grpc
from services.gateway.grpc.call import Servicer
from services.kit.calls.interceptors import Call


class WebhooksServicer(Servicer, webhooks_pb2_grpc.WebhooksServicer):
    """Webhooks, forwarded."""

    async def CreateWebhookEndpoint(
        self, request: webhooks_pb2.CreateWebhookEndpointRequest, context: Call
    ) -> webhooks_pb2.CreateWebhookEndpointResponse:
        """See webhooks.proto."""
        return await self._store.call(
            self._store.webhooks.CreateWebhookEndpoint, request, self._caller()
        )

    async def GetWebhookEndpoint(
        self, request: webhooks_pb2.GetWebhookEndpointRequest, context: Call
    ) -> webhooks_pb2.GetWebhookEndpointResponse:
        """See webhooks.proto."""
        return await self._store.call(
            self._store.webhooks.GetWebhookEndpoint, request, self._caller()
        )

    async def ListWebhookEndpoints(
        self, request: webhooks_pb2.ListWebhookEndpointsRequest, context: Call
    ) -> webhooks_pb2.ListWebhookEndpointsResponse:
        """See webhooks.proto."""
        return await self._store.call(
            self._store.webhooks.ListWebhookEndpoints, request, self._caller()
        )

    async def UpdateWebhookEndpoint(
        self, request: webhooks_pb2.UpdateWebhookEndpointRequest, context: Call
    ) -> webhooks_pb2.UpdateWebhookEndpointResponse:
        """See webhooks.proto."""
        return await self._store.call(
            self._store.webhooks.UpdateWebhookEndpoint, request, self._caller()
        )

    async def DeleteWebhookEndpoint(
        self, request: webhooks_pb2.DeleteWebhookEndpointRequest, context: Call
    ) -> webhooks_pb2.DeleteWebhookEndpointResponse:
        """See webhooks.proto."""
        return await self._store.call(
            self._store.webhooks.DeleteWebhookEndpoint, request, self._caller()
        )

    async def RotateWebhookSecret(
        self, request: webhooks_pb2.RotateWebhookSecretRequest, context: Call
    ) -> webhooks_pb2.RotateWebhookSecretResponse:
        """See webhooks.proto."""
        return await self._store.call(
            self._store.webhooks.RotateWebhookSecret, request, self._caller()
        )

    async def TestWebhookEndpoint(
        self, request: webhooks_pb2.TestWebhookEndpointRequest, context: Call
    ) -> webhooks_pb2.TestWebhookEndpointResponse:
        """See webhooks.proto."""
        return await self._store.call(
            self._store.webhooks.TestWebhookEndpoint, request, self._caller()
        )

    async def ListWebhookEventTypes(
        self, request: webhooks_pb2.ListWebhookEventTypesRequest, context: Call
    ) -> webhooks_pb2.ListWebhookEventTypesResponse:
        """See webhooks.proto."""
        return await self._store.call(
            self._store.webhooks.ListWebhookEventTypes, request, self._caller()
        )

    async def ListWebhookDeliveries(
        self, request: webhooks_pb2.ListWebhookDeliveriesRequest, context: Call
    ) -> webhooks_pb2.ListWebhookDeliveriesResponse:
        """See webhooks.proto."""
        return await self._store.call(
            self._store.webhooks.ListWebhookDeliveries, request, self._caller()
        )

    async def RedeliverWebhook(
        self, request: webhooks_pb2.RedeliverWebhookRequest, context: Call
    ) -> webhooks_pb2.RedeliverWebhookResponse:
        """See webhooks.proto."""
        return await self._store.call(
            self._store.webhooks.RedeliverWebhook, request, self._caller()
        )
