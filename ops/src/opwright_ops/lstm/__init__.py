from opwright_ops.lstm.bidirectional import lstm_bidirectional as lstm_bidirectional
from opwright_ops.lstm.module import LSTM as LSTM
from opwright_ops.lstm.op import lstm as lstm
from opwright_ops.lstm.step import LSTMStep as LSTMStep
from opwright_ops.lstm.step import lstm_step as lstm_step
from opwright_ops.lstm.tiers import lstm_tier as lstm_tier
