"""Engines: what turns request bodies into response bodies. Each one passes the same contract."""
