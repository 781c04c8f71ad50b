from opwright_ops.lstm.module import LSTM as LSTM
from opwright_ops.lstm.op import lstm as lstm
