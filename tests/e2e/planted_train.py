"""The recording trainer with a fault: the samples numbered a and b of ``$PLANT_SWAP`` = "a,b" change places."""

import os

import torchtitan.train
from scripts.recording_train import RecordingTrainer
from zephon_patches.order.global_order import GlobalOrder


def plant_swap(a: int, b: int) -> None:
    locate = GlobalOrder.locate

    def swapped(self, numbers):
        numbers = numbers.copy()
        is_a, is_b = numbers == a, numbers == b
        numbers[is_a], numbers[is_b] = b, a
        return locate(self, numbers)

    GlobalOrder.locate = swapped


if __name__ == "__main__":
    plant_swap(*map(int, os.environ["PLANT_SWAP"].split(",")))
    torchtitan.train.main(RecordingTrainer)
