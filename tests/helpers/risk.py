"""The exact expected risk of SGD on Gaussian linear regression with a diagonal Hessian:
an oracle that needs no sampling.

x ~ N(0, diag(h)), y = x'theta* + N(0, s2), loss 1/2 (x'theta - y)^2. With m_i = E
(theta_i - theta*_i)^2, one step of learning rate eta and batch B gives m_i (1 - 2 eta
h_i + eta^2 h_i^2 (1 + 1/B)) + eta^2/B h_i (sum_j h_j m_j + s2).
"""

import numpy as np


class Regression:
    """SGD's parameters after some steps: eigenvalues h of the Hessian, expected squares
    m of the errors, label noise s2.
    """

    def __init__(self, h, m, s2):
        self.h, self.m, self.s2 = np.asarray(h, float), np.asarray(m, float), float(s2)

    @property
    def risk(self):
        """The expected loss above that of the best parameters."""
        return 0.5 * float(self.h @ self.m)

    def step(self, eta, batch):
        """Return the distribution after one more step."""
        h, m = self.h, self.m
        new = m * (
            1 - 2 * eta * h + (eta * h) ** 2 * (1 + 1 / batch)
        ) + eta**2 / batch * h * (h @ m + self.s2)
        return Regression(h, new, self.s2)

    def after(self, num_steps, eta, batch):
        """Return the distribution after some more steps."""
        state = self
        for _ in range(num_steps):
            state = state.step(eta, batch)
        return state

    @property
    def noise_scale(self):
        """B_noise of McCandlish et al. 2018, eq. 2.7: tr(H Sigma) / G'HG. A step of
        batch B has 1 / (1 + B_noise / B) of the risk decrease of one with the whole
        gradient, if both have their best learning rates.
        """
        h, m = self.h, self.m
        return 1 + float((h @ m + self.s2) * (h @ h) / (h**3 @ m))

    def best_rate(self, batch):
        """Return the learning rate with the largest expected decrease of the risk in
        one step.
        """
        h, m = self.h, self.m
        return float(h**2 @ m / (h**3 @ m)) / (1 + self.noise_scale / batch)


# Problems of known truth, each before the first step.
SPECTRA = {
    "flat": Regression(np.ones(16), np.ones(16), 1.0),
    "two directions": Regression((1.0, 0.01), np.ones(2), 0.2),
    "wide": Regression(1 / np.arange(1, 33) ** 0.7, np.ones(32), 1.0),
    "middle": Regression(1 / np.arange(1, 65) ** 0.8, np.ones(64), 0.5),
    "steep": Regression(1 / np.arange(1, 65), np.ones(64), 0.5),
}
