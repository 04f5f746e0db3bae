use super::*;

fn dims(of: &[(&str, u64)]) -> Dims {
    of.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

fn value(text: &str) -> Result<Fraction, ExpressionError> {
    evaluate(text, &dims(&[("d0", 1), ("d1", 1024), ("x", 3), ("y", 0), ("_a9", 7)]))
}

fn whole(text: &str) -> i128 {
    let value = value(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    assert_eq!(value.denominator, 1, "{text}");
    value.numerator
}

/// The savings that ONNX Runtime printed beside the expressions, at dimensions of 1 and 1,024.
#[test]
fn savings_as_onnx_runtime_prints_them() {
    for (text, bytes) in [
        ("640.0*d0*d1**2", 671_088_640),
        ("d0*d1*(384.0*d1 - 64.0)", 402_587_648),
        ("128.0*d0*d1**2", 134_217_728),
        ("128.0*d0*d1*(d1 - 1)", 134_086_656),
        ("d0*(122880.0*d1 - 20480.0)", 125_808_640),
        ("64.0*d0*d1*(d1 - 1)", 67_043_328),
        ("25600.0*d0*d1", 26_214_400),
        ("20480.0*d0*(d1 - 1)", 20_951_040),
        ("5120.0*d0*(d1 - 1)", 5_237_760),
        ("4.0*d0*d1", 4_096),
        ("2.0*d0*d1", 2_048),
        ("4096.00000000000", 4_096),
        ("4096.0000000000000000000000000000000000000000", 4_096),
    ] {
        assert_eq!(whole(text), bytes, "{text}");
        let dims = dims(&[("d0", 1), ("d1", 1024)]);
        assert_eq!(super::bytes(text, &dims), Ok(u64::try_from(bytes).expect("bytes")), "{text}");
    }
}

#[test]
fn operators_bind_as_in_python() {
    for (text, expected) in [
        ("2**3**2", 512),
        ("(2**3)**2", 64),
        ("-2**2", -4),
        ("(-2)**2", 4),
        ("--x", 3),
        ("2*-x", -6),
        ("10 - 2 - 3", 5),
        ("10 - (2 - 3)", 11),
        ("2 + 3*4", 14),
        ("24/4/2", 3),
        ("24/(4/2)", 12),
        ("2**-0", 1),
        ("0**0", 1),
        (" ( x ) *\t_a9 ", 21),
        ("1**4294967295", 1),
    ] {
        assert_eq!(whole(text), expected, "{text}");
    }
}

#[test]
fn fractions_are_exact() {
    assert_eq!(value("0.1 + 0.2"), Ok(Fraction { numerator: 3, denominator: 10 }));
    assert_eq!(value("1/3 - 1/2"), Ok(Fraction { numerator: -1, denominator: 6 }));
    assert_eq!(value("x/-6"), Ok(Fraction { numerator: -1, denominator: 2 }));
    assert_eq!(whole("(1/3 + 1/6)*2"), 1);
    // 2^53 + 1 is no `f64`.
    assert_eq!(whole("9007199254740993.0*1"), 9_007_199_254_740_993);
    // Reduced crosswise: the product of the numerators alone would not fit.
    assert_eq!(whole("(2**100/3)*(3/2**90)"), 1_024);
    let odd = |text| bytes(text, &dims(&[("x", 3)]));
    assert_eq!(odd("0.5*x"), Ok(1), "rounded down");
    assert_eq!(odd("2**64 - 1"), Ok(u64::MAX));
    assert!(matches!(odd("2**64"), Err(ExpressionError::NotBytes(_))));
    assert_eq!(
        odd("-0.5*x").expect_err("negative").to_string(),
        "the expression's value is -3/2, which is no number of bytes"
    );
}

#[test]
fn what_is_not_understood_is_named_with_its_place() {
    for (text, message) in [
        ("", "expected a number, a name, `-` or `(` at byte 1 of the expression, found its end"),
        ("2*", "expected a number, a name, `-` or `(` at byte 3 of the expression, found its end"),
        ("(x", "expected an operator or `)` at byte 3 of the expression, found its end"),
        ("x)", "expected an operator or the end at byte 2 of the expression, found `)`"),
        ("x y", "expected an operator or the end at byte 3 of the expression, found `y`"),
        ("7//x", "expected a number, a name, `-` or `(` at byte 3 of the expression, found `/`"),
        ("Max(x, 1)", "expected an operator or the end at byte 4 of the expression, found `(`"),
        ("1.x", "expected a digit at byte 3 of the expression, found `x`"),
        ("x\u{1b}", "expected an operator or the end at byte 2 of the expression, found `\\u{1b}`"),
        ("é", "expected a number, a name, `-` or `(` at byte 1 of the expression, found `\\u{e9}`"),
        ("x/y", "division by zero at byte 2 of the expression"),
        ("2**-1", "the exponent at byte 2 of the expression is not an integer from 0 to 4294967295"),
        ("2**0.5", "the exponent at byte 2 of the expression is not an integer from 0 to 4294967295"),
        ("x + 2**127", "the value at byte 6 of the expression needs more than 128 bits"),
        ("2**126*3", "the value at byte 7 of the expression needs more than 128 bits"),
        ("2**126 + 2**126", "the value at byte 8 of the expression needs more than 128 bits"),
    ] {
        assert_eq!(value(text).expect_err(text).to_string(), message, "{text}");
    }
    assert_eq!(value(&"9".repeat(40)), Err(ExpressionError::Overflow { at: 1 }));
    assert_eq!(value("0.0000000000000000000000000000000000000001"), Err(ExpressionError::Overflow { at: 1 }));
}

#[test]
fn all_names_without_a_value_are_named() {
    let error = value("x*(b + a)/y + b").expect_err("a and b");
    assert_eq!(error.to_string(), "no value for a, b; the expression needs a, b, x, y");
    // A fault of the form is one whatever has a value.
    assert!(matches!(value("a*"), Err(ExpressionError::Syntax { at: 3, .. })));
}

#[test]
fn length_and_depth_are_bounded() {
    let nested = |depth: usize| format!("{}x{}", "(".repeat(depth), ")".repeat(depth));
    assert_eq!(whole(&nested(MOST_DEPTH)), 3);
    assert_eq!(value(&nested(MOST_DEPTH + 1)), Err(ExpressionError::TooDeep { at: MOST_DEPTH + 2 }));
    for hostile in ["(", "-", "1**", "-("] {
        let text = hostile.repeat(MOST_BYTES / hostile.len());
        assert!(matches!(value(&text), Err(ExpressionError::TooDeep { .. })), "{hostile}");
    }
    let long = format!("1{}", "+1".repeat((MOST_BYTES - 1) / 2));
    assert_eq!(whole(&long), 8_192);
    assert_eq!(value(&" ".repeat(MOST_BYTES + 1)), Err(ExpressionError::TooLong(MOST_BYTES + 1)));
}

/// A tree of the same form beside the parser: every expression of up to three operators on small numbers.
#[test]
fn as_a_tree_of_small_integers() {
    let numbers = [0_i128, 1, 2, 5];
    for nth in 0..64 {
        let (a, b, c) = (numbers[nth % 4], numbers[nth / 4 % 4], numbers[nth / 16]);
        assert_eq!(whole(&format!("{a}+{b}*{c}")), a + b * c);
        assert_eq!(whole(&format!("({a}-{b})*{c}")), (a - b) * c);
        assert_eq!(whole(&format!("{a}*{b}**{c}")), a * b.pow(u32::try_from(c).expect("small")));
        assert_eq!(whole(&format!("-{a}-{b}--{c}")), -a - b + c);
        if b != 0 {
            let quotient = value(&format!("{a}/{b} + {c}")).expect("no zero");
            assert_eq!(quotient.numerator * b, (a + c * b) * quotient.denominator);
        }
    }
}
