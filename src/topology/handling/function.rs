//! `handle_fn`: a function, no state.

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;

use super::{BoxFuture, Code, Handling, Runner, Supply, WorkPlace, decode};
use crate::message::{BoxError, Codec, Context, Outcome};

pub(crate) struct Function<T, C, F> {
    inner: Arc<(C, F)>,
    message: PhantomData<fn() -> T>,
}

impl<T, C, F> Function<T, C, F> {
    pub(crate) fn new(codec: C, function: F) -> Self {
        Function {
            inner: Arc::new((codec, function)),
            message: PhantomData,
        }
    }
}

impl<T, C, F, Fut> Handling for Function<T, C, F>
where
    T: Send + 'static,
    C: Codec<T>,
    F: Fn(T, Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Outcome, BoxError>> + Send + 'static,
{
    fn start(&self, _: WorkPlace) -> BoxFuture<'_, Result<Code, BoxError>> {
        let runner = Function {
            inner: Arc::clone(&self.inner),
            message: PhantomData,
        };
        Box::pin(async move { Ok(Code::Calls(Box::new(runner))) })
    }
}

impl<T, C, F, Fut> Runner for Function<T, C, F>
where
    T: Send + 'static,
    C: Codec<T>,
    F: Fn(T, Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Outcome, BoxError>> + Send + 'static,
{
    fn run<'a>(&'a mut self, supply: &'a mut dyn Supply) -> BoxFuture<'a, ()> {
        let (codec, function) = &*self.inner;
        Box::pin(async move {
            let mut next = supply.next();
            while let Some((run, context)) = next {
                let verdict = match decode(codec, &context) {
                    Ok(message) => function(message, context).await.into(),
                    Err(undecodable) => undecodable,
                };
                next = supply.settle_and_next(run, verdict);
            }
        })
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async {})
    }
}
