//! CRC-32C of bytes, and of pieces from their checksums.
//!
//! A checksum is a polynomial modulo Castagnoli's, reflected: bit 31 is x^0. To append n bytes multiplies by x^(8n).

const POLYNOMIAL: u32 = 0x82F6_3B78;
const ONE: u32 = 1 << 31;

/// The checksum of `data`.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// For each n, the byte b times x^(8 (n + 1)).
static TABLES: [[u32; 256]; 8] = {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut value = byte as u32;
        let mut n = 0;
        while n < 64 {
            value = (value >> 1) ^ (POLYNOMIAL & (value & 1).wrapping_neg());
            n += 1;
            if n % 8 == 0 {
                tables[n / 8 - 1][byte] = value;
            }
        }
        byte += 1;
    }
    tables
};

/// The polynomial of the bytes times x^32. Each byte is looked up on its own, so the processor does all at once.
#[inline(always)]
fn carry<const N: usize>(bytes: [u8; N]) -> u32 {
    const { assert!(N <= 8) };
    (0..N).fold(0, |found, n| found ^ TABLES[N - 1 - n][usize::from(bytes[n])])
}

/// The checksum of a piece that 8 bytes follow.
#[inline]
pub fn extend(checksum: u32, bytes: [u8; 8]) -> u32 {
    !carry((u64::from_le_bytes(bytes) ^ u64::from(!checksum)).to_le_bytes())
}

/// The product of two polynomials.
#[inline]
fn multiply(a: u32, b: u32) -> u32 {
    let wide = (0..32).fold(0, |found, n| found ^ ((u64::from(b) << (n + 1)) & u64::from(a >> n & 1).wrapping_neg()));
    (wide >> 32) as u32 ^ carry((wide as u32).to_le_bytes())
}

/// x^(8 * 2^n) for each n: a length is a product of them.
fn squares() -> [u32; 64] {
    let mut squares = [ONE >> 8; 64];
    for n in 1..64 {
        squares[n] = multiply(squares[n - 1], squares[n - 1]);
    }
    squares
}

/// Joins checksums of pieces. The blocks of a batch often have equal lengths, so the last operator is kept.
pub struct Joiner {
    squares: [u32; 64],
    length: u64,
    operator: u32,
}

impl Default for Joiner {
    fn default() -> Self {
        Self { squares: squares(), length: 0, operator: ONE }
    }
}

impl Joiner {
    /// The checksum of two pieces together; `length` is the number of bytes of the second one.
    #[inline]
    pub fn join(&mut self, first: u32, second: u32, length: u64) -> u32 {
        if self.length != length {
            self.length = length;
            let bits = self.squares.iter().enumerate().filter(|(n, _)| length >> n & 1 == 1);
            self.operator = bits.fold(ONE, |found, (_, square)| multiply(*square, found));
        }
        multiply(self.operator, first) ^ second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_give_the_checksum_of_the_whole() {
        let data: Vec<u8> = (0..5_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        assert_eq!(crc32c(b"123456789"), 0xE306_9283); // the check value of CRC-32C
        let mut joiner = Joiner::default();
        for cut in [5_000, 0, 1, 7, 64, 64, 4_999, 5_000] {
            let (first, second) = data.split_at(cut);
            assert_eq!(joiner.join(crc32c(first), crc32c(second), second.len() as u64), crc32c(&data));
        }
    }

    #[test]
    fn eight_more_bytes_extend_a_checksum() {
        let data: Vec<u8> = (0..300u32).map(|n| (n * n) as u8).collect();
        for length in 0..200 {
            let (first, rest) = data.split_at(length);
            let more: [u8; 8] = *rest.first_chunk().unwrap();
            assert_eq!(extend(crc32c(first), more), crc32c(&data[..length + 8]));
        }
    }
}
