//! CRC-32C of bytes, and of pieces from their checksums.

/// Castagnoli's polynomial, reflected: bit 31 is x^0.
const POLYNOMIAL: u32 = 0x82F6_3B78;
const ONE: u32 = 1 << 31;

/// The checksum of `data`.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// The product of two polynomials modulo Castagnoli's.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = ONE;
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = if b & 1 != 0 {
            (b >> 1) ^ POLYNOMIAL
        } else {
            b >> 1
        };
        bit >>= 1;
    }
    product
}

/// x^(8 * 2^n) for each n: a length is a product of them.
const SQUARES: [u32; 64] = {
    let mut squares = [ONE >> 8; 64];
    let mut n = 1;
    while n < 64 {
        squares[n] = multiply(squares[n - 1], squares[n - 1]);
        n += 1;
    }
    squares
};

/// Joins checksums of pieces. The blocks of a batch often have equal lengths, so the last operator is kept.
#[derive(Default)]
pub struct Joiner {
    length: u64,
    operator: u32,
}

impl Joiner {
    /// The checksum of two pieces together; `length` is the number of bytes of the second one.
    pub fn join(&mut self, first: u32, second: u32, length: u64) -> u32 {
        if length == 0 || self.length != length {
            self.length = length;
            self.operator = (0..64)
                .filter(|n| length >> n & 1 == 1)
                .fold(ONE, |found, n| multiply(SQUARES[n], found));
        }
        multiply(self.operator, first) ^ second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_give_the_checksum_of_the_whole() {
        let data: Vec<u8> = (0..5_000u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        assert_eq!(crc32c(b"123456789"), 0xE306_9283); // the check value of CRC-32C
        let mut joiner = Joiner::default();
        for cut in [5_000, 0, 1, 7, 64, 64, 4_999, 5_000] {
            let (first, second) = data.split_at(cut);
            assert_eq!(
                joiner.join(crc32c(first), crc32c(second), second.len() as u64),
                crc32c(&data)
            );
        }
    }
}
