"""The HTTP front: OpenAI's shapes, server-sent events, errors in one sentence.

Knows: requests and answers as JSON, who may ask, when to say that there is no room. Refuses to know: scheduling, devices, how the
engine is started (only a protocol, `front.EngineClient`). Needs the extra `server` (starlette); nothing outside this folder imports it.

      edge -> app (routes) -> chat | completions | responses -> flight -> EngineClient
                                                          pipeline <- events       sse -> bytes
"""
