//! The fields of a block's header; `docs/formats.md` has the table. Nothing is checked here.
pub use crate::block::{CHECKED_FROM, HEADER_BYTES, TIME_MS_END};
const DELTA_SATURATED: u32 = u32::MAX;

/// `N` bytes from `AT` on. The bound is checked when this is compiled.
#[inline(always)]
pub fn word<const AT: usize, const N: usize, const SIZE: usize>(bytes: &[u8; SIZE]) -> [u8; N] {
    const { assert!(AT + N <= SIZE) };
    std::array::from_fn(|n| bytes[AT + n])
}

/// One header.
#[derive(Clone, Copy)]
pub struct Header<'a>(pub &'a [u8; HEADER_BYTES]);

macro_rules! fields {
    ($($name:ident: $kind:ty, $at:literal;)*) => {
        $(#[inline(always)] pub fn $name(&self) -> $kind { <$kind>::from_le_bytes(word::<$at, _, _>(self.0)) })*
    };
}

impl<'a> Header<'a> {
    /// The header that `data` begins with; None when it is cut.
    #[inline(always)]
    pub fn of(data: &'a [u8]) -> Option<Self> {
        data.first_chunk().map(Self)
    }

    fields! {
        magic: u32, 0;
        checksum: u32, 4;
        version: u8, 8;
        codec: u8, 9;
        flags: u16, 10;
        payload: u32, 12;
        raw: u32, 16;
        count: u32, 20;
        producer_epoch: u32, 24;
        scope: u32, 28;
        producer_id: u64, 32;
        first_sequence: u64, 40;
        base_ms: i64, 48;
        max_delta_ms: u32, 56;
        slot_first: u16, 60;
        slot_last: u16, 62;
        tag_bits: u64, 64;
    }

    /// The first bytes, which the block's own checksum does not cover.
    #[inline(always)]
    pub fn start(&self) -> [u8; CHECKED_FROM] {
        word::<0, CHECKED_FROM, _>(self.0)
    }

    /// Producer id, first sequence and least timestamp, as they lie in an index entry, too.
    #[inline(always)]
    pub fn identity(&self) -> [u8; 24] {
        word::<32, 24, _>(self.0)
    }

    /// Both slots and the tag bits, as they lie in an index entry, too.
    #[inline(always)]
    pub fn tail(&self) -> [u8; 12] {
        word::<60, 12, _>(self.0)
    }

    /// The greatest timestamp, or an upper bound of it.
    #[inline(always)]
    pub fn greatest_ms(&self) -> i64 {
        match self.max_delta_ms() {
            DELTA_SATURATED => TIME_MS_END - 1,
            delta => self.base_ms().saturating_add(delta.into()).min(TIME_MS_END - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_where_the_format_says() {
        let bytes: [u8; HEADER_BYTES] = std::array::from_fn(|n| n as u8);
        let header = Header(&bytes);
        assert_eq!((header.magic(), header.checksum()), (0x0302_0100, 0x0706_0504));
        assert_eq!((header.version(), header.codec(), header.flags()), (8, 9, 0x0B0A));
        assert_eq!((header.payload(), header.raw(), header.count()), (0x0F0E_0D0C, 0x1312_1110, 0x1716_1514));
        assert_eq!((header.producer_epoch(), header.scope()), (0x1B1A_1918, 0x1F1E_1D1C));
        assert_eq!((header.producer_id(), header.first_sequence()), (0x2726_2524_2322_2120, 0x2F2E_2D2C_2B2A_2928));
        assert_eq!((header.base_ms(), header.max_delta_ms()), (0x3736_3534_3332_3130, 0x3B3A_3938));
        assert_eq!((header.slot_first(), header.slot_last()), (0x3D3C, 0x3F3E));
        assert_eq!(header.tag_bits(), 0x4746_4544_4342_4140);
        assert!(Header::of(&bytes[1..]).is_none());
    }

    #[test]
    fn the_greatest_time_is_bounded() {
        let mut bytes = [0; HEADER_BYTES];
        for (base, delta, greatest) in [
            (5i64, 7u32, 12),
            (5, DELTA_SATURATED, TIME_MS_END - 1),
            (TIME_MS_END - 3, 2, TIME_MS_END - 1),
            (TIME_MS_END - 3, 9, TIME_MS_END - 1),
            (i64::MAX, 9, TIME_MS_END - 1),
            (i64::MIN, 9, i64::MIN + 9),
        ] {
            bytes[48..56].copy_from_slice(&base.to_le_bytes());
            bytes[56..60].copy_from_slice(&delta.to_le_bytes());
            assert_eq!(Header(&bytes).greatest_ms(), greatest);
        }
    }
}
