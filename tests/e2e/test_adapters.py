"""What the process says of the adapters when it starts."""


def test_the_start_names_the_adapters_that_are_served_and_what_the_others_lack(serve):
    line = serve().adapters
    assert line.startswith("acclimate: adapters atp, ")
    assert line.endswith("; not served: fed_ade lacks anchors\n")
