"""The models in the box (`checkpoints`) and the word problems they were trained on (`problems`)."""
