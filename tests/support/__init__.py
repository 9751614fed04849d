"""What tests share: graphs, jobs, ranks, hosts, stores, and models as users write them."""
