//! Enumerations that are label values: each variant is listed once, so that none is forgotten in a list beside it.

/// Declares an enumeration with a label value for each variant. `ALL` has the variants in the order of their numbers, and `label`
/// returns the value. An array of counters has `ALL.len()` elements and is indexed by `self as usize`.
#[macro_export]
macro_rules! labels {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$of:meta])* $variant:ident = $label:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(usize)]
        $vis enum $name {
            $($(#[$of])* $variant,)+
        }

        impl $name {
            /// Every one, in the order of their numbers.
            pub const ALL: [Self; [$($label),+].len()] = [$(Self::$variant),+];

            /// The label value.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                }
            }
        }
    };
}
