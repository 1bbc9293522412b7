"""A server with FastAPI that follows the run of a trainer. Each worker of a host maps the same files.

RUN=checkpoints uvicorn --workers 2 --app-dir examples/servers fastapi_server:app
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI, HTTPException, Response

import sidestream

live = sidestream.Live(torch.nn.Linear(4, 1, bias=False))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with (
        sidestream.Checkpointer(os.environ["RUN"]) as checkpoints,
        checkpoints.following(live, names=sidestream.strip_prefix("model.")) as app.state.follower,
    ):
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
def predict(inputs: list[float], response: Response) -> dict[str, float]:  # FastAPI calls it in a thread
    with live.reading() as reading, torch.inference_mode():
        if reading.stamp is None:
            raise HTTPException(503, "no weights yet")
        response.headers["X-Weights"] = reading.stamp
        return {"prediction": reading.module(torch.tensor(inputs)).item()}


@app.get("/health")
async def health(response: Response) -> dict[str, object]:
    health = app.state.follower.health()
    response.status_code = 503 if health.stamp is None else 200
    return {"weights": health.stamp, "problem": health.problem, "passed_over": dict(health.passed_over)}
