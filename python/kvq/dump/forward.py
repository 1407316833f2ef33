"""Runs the prompts through the model, one at a time."""

import torch
from transformers import DynamicCache

from .placement import input_device


def decoder_of(model):
    """The decoder of a causal language model, which for a multimodal model is that of its text half."""
    return model.get_decoder()


def run_text(text, ids: torch.Tensor, positions: torch.Tensor):
    """One forward pass of a model's decoder over ids [B, n] without a cache and without logits.

    The mask of ones is necessary: without a mask, transformers takes jumping positions for several packed sequences,
    and a stretched prompt would see none of its past.
    """
    return text(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)


@torch.no_grad()
def run_prompt(text, recorder, tokens: list[int], first_row: int, stride: int) -> None:
    """One forward pass over one sequence. Without a cache and without logits, memory does not grow with the number of
    layers."""
    device = input_device(text)
    recorder.row = first_row
    run_text(text, torch.tensor([tokens], device=device), positions_of(0, len(tokens), stride, device))
    recorder.row = None


@torch.no_grad()
def run_and_generate(
    model, recorder, tokens: list[int], first_row: int, stride: int, count: int, banned: list[int]
) -> list[int]:
    """The prompt, then `count` greedy tokens with a KV cache; each of them passes through the model.

    `banned` (end of text) is never chosen, so that each sequence has exactly the length for which the dump has room.
    """
    text = decoder_of(model)
    cache = DynamicCache(config=text.config)
    device = input_device(text)
    chosen, step = [], torch.tensor([tokens], device=device)
    for _ in range(count + 1):
        start = len(tokens) + len(chosen) - step.shape[1]
        recorder.row = first_row + start
        hidden = text(
            input_ids=step,
            position_ids=positions_of(start, step.shape[1], stride, device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[0, -1]
        if len(chosen) == count:
            break
        logits = model.get_output_embeddings()(hidden)  # a cap or a scale of the logits does not change the largest one
        logits[banned] = -torch.inf
        chosen.append(int(logits.argmax()))
        step = torch.tensor([chosen[-1:]], device=device)
    recorder.row = None
    return chosen


def positions_of(start: int, count: int, stride: int, device) -> torch.Tensor:
    """Position ids [1, count] of the tokens `start ..` of a sequence."""
    return (torch.arange(start, start + count, device=device) * stride).unsqueeze(0)
