"""Tests on two to eight ranks, reused gloo processes of this machine."""
