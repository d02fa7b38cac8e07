# SPDX-License-Identifier: Apache-2.0
"""loops.py <framework> <samples> <report>: a framework's own accumulation over windows of 4 micro-batches, watched.

The samples go twice through micro-batches of 8, or of 2 for transformers; 16 and 64 fill all windows, and 21 and 83
end with a small micro-batch in a short window. See tests/check/history.
"""

import logging
import os
import sys
import tempfile
import warnings
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", CUDA_VISIBLE_DEVICES="")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from gradaccum import check  # noqa: E402
from torch import Tensor, nn  # noqa: E402

WORDS, LENGTH, CLASSES = 50, 12, 5
BERT = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip
TRAINER = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2, "use_cpu": True,
    "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "max_grad_norm": 0.1,
}  # fmt: skip


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, CLASSES))


def data(samples: int) -> torch.utils.data.TensorDataset:
    torch.manual_seed(2)
    return torch.utils.data.TensorDataset(torch.randn(samples, 20), torch.randint(0, CLASSES, (samples,)))


def batches(samples: int) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(data(samples), batch_size=8)


# ---- transformers


def _train(net: Any, samples: int, labels: str) -> None:
    import transformers

    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, WORDS, (samples, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (samples, 1), generator=generator)
    classes = torch.randint(0, 3, (samples,), generator=generator)
    given = words.where(mask, torch.tensor(-100)) if labels == "words" else classes
    rows = [{"input_ids": words[i], "attention_mask": mask[i].long(), "labels": given[i]} for i in range(samples)]
    arguments = transformers.TrainingArguments(tempfile.mkdtemp(), **TRAINER)
    transformers.Trainer(net, arguments, train_dataset=rows).train()


def language_model(samples: int) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    _train(transformers.LlamaForCausalLM(config), samples, "words")


def classifier(samples: int) -> None:
    import transformers

    torch.manual_seed(0)
    _train(transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=3)), samples, "classes")


def sentences(samples: int) -> None:
    import datasets
    import sentence_transformers
    import transformers

    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    letters = [chr(ord("a") + i) for i in range(26)]
    transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(folder)
    with open(f"{folder}/vocab.txt", "w") as file:
        file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]))
    transformers.BertTokenizer(f"{folder}/vocab.txt").save_pretrained(folder)
    words = sentence_transformers.models.Transformer(folder)
    pooling = sentence_transformers.models.Pooling(words.get_word_embedding_dimension())
    net = sentence_transformers.SentenceTransformer(modules=[words, pooling], device="cpu")
    texts = [" ".join(letters[(7 * i + k * k) % 26] for k in range(5)) for i in range(2 * samples)]
    rows = datasets.Dataset.from_dict(
        {"a": texts[:samples], "b": texts[samples:], "score": [i / samples for i in range(samples)]}
    )
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(tempfile.mkdtemp(), **TRAINER)
    loss = sentence_transformers.losses.CosineSimilarityLoss(net)
    sentence_transformers.SentenceTransformerTrainer(net, arguments, train_dataset=rows, loss=loss).train()


# ---- Others


def accelerate(samples: int) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = network()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), batches(samples))
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()


def lightning(samples: int) -> None:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_epochs=2, accumulate_grad_batches=4, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), batches(samples))


def ignite(samples: int) -> None:
    from ignite.engine import create_supervised_trainer

    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    trainer = create_supervised_trainer(net, optimizer, F.cross_entropy, gradient_accumulation_steps=4)
    trainer.run(batches(samples), max_epochs=2)


def fastai(samples: int) -> None:
    import functools

    from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, OptimWrapper
    from fastai.callback.training import GradientAccumulation

    loaders = [DataLoader(data(samples), bs=8, num_workers=0) for _ in range(2)]
    learner = Learner(
        DataLoaders(*loaders), network(), loss_func=CrossEntropyLossFlat(),
        opt_func=functools.partial(OptimWrapper, opt=torch.optim.SGD), cbs=[GradientAccumulation(32)],
    )  # fmt: skip
    with learner.no_bar(), learner.no_logging():
        learner.fit(2, 0.1)


def mmengine(samples: int) -> None:
    from mmengine.optim import OptimWrapper

    net = network()
    wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), 0.1), accumulative_counts=4)
    loader = batches(samples)
    wrapper.initialize_count_status(net, 0, len(loader))
    for x, y in loader:
        with wrapper.optim_context(net):
            loss = F.cross_entropy(net(x), y)
        wrapper.update_params(loss)


if __name__ == "__main__":
    with check.record() as recording:
        globals()[sys.argv[1]](int(sys.argv[2]))
    recording.report.save(sys.argv[3])
