from datasets import Dataset
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


images, labels = load_digits(return_X_y=True)  # 1,797 handwritten digits of 8 x 8 pixels
pixels = (images / 8 - 1).astype("float32").reshape(-1, 1, 8, 8)
digits = Dataset.from_dict({"pixel_values": pixels, "labels": labels}).with_format("torch")
digits = digits.train_test_split(test_size=297, seed=0)

model = ViTForImageClassification(
    ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=64, num_hidden_layers=6,
        num_attention_heads=4, intermediate_size=256, initializer_range=0.1,
    )
)  # fmt: skip
args = PipeTransformerArguments(
    output_dir="outputs/quick_start",
    pipeline_parallel_size=2,
    freeze_policy="gradient_norm",
    num_train_epochs=4,
    per_device_train_batch_size=32,
    learning_rate=2e-3,
    report_to="none",
)
trainer = PipeTransformerTrainer(model, args, train_dataset=digits["train"], eval_dataset=digits["test"])
trainer.train()
print(trainer.evaluate())
print(trainer.layout)
trainer.end()  # leaves the process group
