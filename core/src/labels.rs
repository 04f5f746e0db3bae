//! Enumerations that are label values: each variant is listed once, so that none is forgotten in a list beside it.

/// Declares an enumeration with the label value of each variant, in the order of their numbers: `ALL` has all of them, and
/// `label` gives the value. What counts by them has `ALL.len()` places and takes `self as usize` for the place.
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
