"""transformers' `generate` as a server: what is waiting becomes one static, left-padded batch (run by transformers' own
environment; standard library only besides it). The whole batch is computed, then sent: time to first token is the batch's."""

from __future__ import annotations

import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM

WAITING: queue.Queue[tuple[list[int], int, queue.Queue[list[int]]]] = queue.Queue()


def serve_batches(model: torch.nn.Module) -> None:
    while True:
        batch = [WAITING.get()]
        try:
            while len(batch) < 32:
                batch.append(WAITING.get(timeout=0.02))
        except queue.Empty:
            pass
        width, count = max(len(p) for p, _, _ in batch), max(n for _, n, _ in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, (prompt, _, _) in enumerate(batch):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )
        for row, (_, n, reply) in zip(out, batch, strict=True):
            reply.put(row[width : width + n].tolist())


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply: queue.Queue[list[int]] = queue.Queue()
        WAITING.put((body["prompt"], body["max_tokens"], reply))
        tokens = reply.get()
        self.send_response(200)
        self.end_headers()
        for _ in tokens:
            self.wfile.write(b'data: {"choices":[{"text":"x"}]}\n\n')
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": len(tokens)}}, separators=(",", ":"))
        self.wfile.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())


if __name__ == "__main__":
    torch.set_num_threads(2)
    loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    threading.Thread(target=serve_batches, args=(loaded,), daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
