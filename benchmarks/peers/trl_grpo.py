"""GRPO in TRL through its trainer on a CPU: transformers' generate, a frozen reference, one update a step."""

from __future__ import annotations

import os
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import datasets
import tokenizers
import torch
import transformers
import trl

from benchmarks.peers import shared


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
  """One token a byte, without a download; the three special tokens follow the 256 bytes as they do in `shared`."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  names = [*alphabet, "<pad>", "<s>", "</s>"]
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
  )


def policy(size: str, folder: str, tokenizer) -> torch.nn.Module:
  """A random Qwen2 that was saved and loaded once: TRL loads the reference from where the policy came from."""
  s = shared.SIZES[size]
  config = transformers.Qwen2Config(
    vocab_size=shared.VOCABULARY,
    hidden_size=s["hidden"],
    intermediate_size=s["feed_forward"],
    num_hidden_layers=s["layers"],
    num_attention_heads=s["heads"],
    num_key_value_heads=s["kv_heads"],
    rope_theta=1e6,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    initializer_range=shared.DEVIATION,
    pad_token_id=shared.PAD,
    bos_token_id=shared.BOS,
    eos_token_id=shared.EOS,
  )
  torch.manual_seed(0)
  transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
  tokenizer.save_pretrained(folder)
  return transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main() -> None:
  flags = shared.flags()
  steps = flags.steps + 1
  tokens, first = [], []
  tokenizer = byte_tokenizer()
  with tempfile.TemporaryDirectory() as model_folder, tempfile.TemporaryDirectory() as output_folder:
    model = policy(flags.size, model_folder, tokenizer)

    def reward(prompts, completions, completion_ids, **unused):
      tokens.append(sum(map(len, completion_ids)))
      return [shared.reward(c) for c in completions]

    batch = shared.PROMPTS * shared.MEMBERS
    config = trl.GRPOConfig(
      output_dir=output_folder,
      per_device_train_batch_size=batch,
      num_generations=shared.MEMBERS,
      max_completion_length=shared.NEW_TOKENS,
      learning_rate=shared.LEARNING_RATE,
      lr_scheduler_type="constant",
      beta=shared.KL_COEFFICIENT,
      epsilon=shared.CLIP,
      temperature=1.0,
      top_k=0,
      max_steps=steps,
      report_to="none",
      save_strategy="no",
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      disable_tqdm=True,
    )
    rows = [{"prompt": prompt} for step in range(steps) for prompt in shared.prompts(step)]
    watch = shared.Stopwatch()
    trainer = trl.GRPOTrainer(
      model=model,
      reward_funcs=reward,
      args=config,
      train_dataset=datasets.Dataset.from_list(rows),
      processing_class=tokenizer,
    )
    watch.wrap(trainer, "_generate", "generation")

    class Ends(transformers.TrainerCallback):
      def on_step_end(self, *unused, **also_unused):
        first or first.append(shared.since_start())
        watch.ends.append(shared.time.perf_counter())

    trainer.add_callback(Ends())
    trainer.train()
    count = sum(p.numel() for p in model.parameters())
  steps_taken, generation = watch.steps(), watch.seconds["generation"][1:]
  # TRL scores and updates in one call: what of a step is not generation
  rest = [s - g for s, g in zip(steps_taken, generation, strict=False)]
  shared.report(
    params=count,
    tokens=tokens[1:],
    first_update=first[0],
    step=steps_taken,
    generation=generation,
    scoring_and_update=rest,
  )


if __name__ == "__main__":
  main()
